"""Gaussian processes as arithmetic: priors, conditionals, latents. No sites here."""
