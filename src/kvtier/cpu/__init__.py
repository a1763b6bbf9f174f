"""The primary tier: host memory, its books, its region and the copies from and to the device."""
