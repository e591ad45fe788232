"""From a checkpoint to a runner: files, options, the decision, weights and tokenizers."""
