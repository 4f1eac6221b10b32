"""Translation: sentence pairs, an LSTM encoder and decoder with attention, BLEU."""
