"""Properties of distributions, `omega.json`: holds, fails or unknown, and a check of the answer."""
