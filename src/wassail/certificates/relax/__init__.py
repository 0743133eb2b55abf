"""What the values of a network can be on a region."""
