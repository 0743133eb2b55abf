"""One file per method; each turns `(model, x, y, ...)` into `Flips` or a `Distribution`."""
