"""Hold the code that attention kernels for Hopper and Blackwell share: all but instructions."""
