"""The command `towpath`: main.py, and one file for each group of commands.

May import: everything below; torch only in the commands that need it.
"""
