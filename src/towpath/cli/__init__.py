"""The command `towpath`: main.py, output.py, where it prints, and one file for each group of commands.

May import: everything below; torch only in the commands that need it.
"""
