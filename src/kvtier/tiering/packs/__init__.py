"""The tier of local disks: packs of equal slots, each written by one process and read by all."""
