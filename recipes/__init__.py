"""The reference pretraining program."""
