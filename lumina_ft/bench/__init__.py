"""`lumina-ft bench`: what the heavy parts cost against their alternatives, after checking that both agree."""
