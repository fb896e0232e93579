"""Memory: the arena and its superblocks, pages owned by heads, shared segments, the open block, the commit line."""
