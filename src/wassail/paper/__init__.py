"""The paper's table and figures."""
