"""Replays request traces through the production managers and policies on simulated time."""
