"""What a network is: its maps, its nodes, and how it is read from a model."""
