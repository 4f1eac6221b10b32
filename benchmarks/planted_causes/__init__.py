"""Small networks, each with one planted cause of failure: what do explain and advise say?"""
