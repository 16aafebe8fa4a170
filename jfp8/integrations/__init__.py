"""Recipes in trainers of others, by their own options. `jfp8` imports none of these modules."""
