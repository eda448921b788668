"""The command `towpath`: main.py, terminal.py with what all commands share, and one file for each group of commands.

May import: everything below. Only the commands that need torch import it.
"""
