"""Who is where: the shape of the cluster (`cluster`, without torch) and its process groups (`groups`).

May import: errors.
"""
