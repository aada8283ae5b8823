"""Every kernel against its peers, on this machine."""
