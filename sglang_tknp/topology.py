from dataclasses import dataclass
@dataclass(frozen=True, kw_only=True)
class Topology:
    num_nodes:int; tp_size:int; rank:int
    @property
    def node(self): return self.rank//self.tp_size
    @property
    def tp_rank(self): return self.rank%self.tp_size
    def all_peer_groups(self): return tuple(tuple(n*self.tp_size+t for n in range(self.num_nodes)) for t in range(self.tp_size))
