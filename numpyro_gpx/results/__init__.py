"""What an engine returns: `Fit`, the same for all of them."""
