"""The protocol, the run store, and what is computed from a finished run."""
