"""Small piecewise-linear networks in dense form: nearest flips, Lipschitz constants, cells."""
