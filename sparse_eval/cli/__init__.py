"""From words on the command line to validated settings, and what a person sees meanwhile."""
