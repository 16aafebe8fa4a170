"""Everything that knows a chip or the habits of a compiler: one planner for each kind of device."""
