"""Rotation of heads by position, after a norm of each head where there is one."""
