"""Pages from results files."""
