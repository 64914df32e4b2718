"""Small helpers without a framework."""
