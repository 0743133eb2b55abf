"""One file for each kind of operator: all that is known of it, and how torch spells it."""
