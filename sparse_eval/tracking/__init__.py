"""What a run tells a tracker: nothing, or W&B, a window on the run's folder."""
