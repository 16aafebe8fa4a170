"""Everything specific to a chip or a compiler: one `Planner` for each kind of device."""
