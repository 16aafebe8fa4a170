"""The reference: products in f32 arithmetic, on any device."""
