"""Triton pieces that the attentions over clusters share: rows sorted by cluster, cluster means, centroid attention.

Sizes: `B` batch, `H` heads, `N` query length, `M` key length, `C` clusters, `P = B · H` problems. A table
`(P, C, ...)` of clusters is, where `G` query heads share a key head, also a table `(P / G, G · C, ...)`: all clusters
of one key head are one table.
"""
