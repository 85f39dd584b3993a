"""Conversations, rollouts, and the training batches built from them."""
