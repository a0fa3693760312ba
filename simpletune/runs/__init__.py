"""What did a run leave? Its folder, names, checkpoints, resume, summary and model card."""
