"""lumina-ft: staged fine-tuning of multi-codebook mixture-of-experts diffusion models."""

__version__ = "0.1.0"
