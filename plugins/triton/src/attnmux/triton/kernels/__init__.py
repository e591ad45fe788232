"""The kernels. Importing one imports Triton.

blocks.py   keys block by block, and the running softmax: what the two below share
tiles.py    many new tokens a request: tiles of queries
shares.py   few new tokens over many keys: keys in equal shares
merge.py    two partial results as one
write.py    K and V of new tokens to their slots
indices.py  what kernels read, from lengths and the request table
picks.py    slots of the places that an indexer picks
"""
