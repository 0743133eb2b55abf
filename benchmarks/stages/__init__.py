"""The stages, from cheap to dear."""
