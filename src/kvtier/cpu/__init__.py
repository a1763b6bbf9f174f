"""The primary tier: host memory, its block table, its region and the copies from and to the device."""
