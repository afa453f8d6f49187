"""A model with its arguments: what it consists of, its density and its bounds."""
