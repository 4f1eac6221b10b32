"""Speech: utterances with their texts, Deep Speech 2, CTC."""
