"""What guides are made of."""
