"""Text in subwords: `data.tokenizer` of texts and of sentence pairs."""
