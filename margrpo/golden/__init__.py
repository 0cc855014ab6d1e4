"""Replay of golden folders: does this installation reproduce the reference numbers?"""
