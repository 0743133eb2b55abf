"""An evaluation on many machines, by Ray."""
