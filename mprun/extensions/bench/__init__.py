"""Speed, memory and energy of training steps: mprun's own, those of its peers, and the limit."""
