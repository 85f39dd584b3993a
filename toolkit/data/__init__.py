"""Conversations, rollouts, and the training batches made of them."""
