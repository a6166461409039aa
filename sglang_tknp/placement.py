from dataclasses import dataclass
@dataclass
class ModelBytes:
    embedding:int; layers:tuple; final_norm:int; head:int; tied:bool
@dataclass
class Placement:
    blocks: tuple; node_bytes: tuple
    @property
    def num_nodes(self): return len(self.blocks)
    @property
    def num_layers(self): return sum(self.blocks)
    @property
    def bounds(self): return tuple((sum(self.blocks[:i]),sum(self.blocks[:i+1])) for i in range(len(self.blocks)))
    def block(self,n): return range(*self.bounds[n])
def balance(model,n):
    L=len(model.layers); b=[L//n]*n; b[-1]+=L-sum(b); return Placement(tuple(b),(0,)*n)
def place(model,b): return Placement(tuple(b),(0,)*len(b))
def parse_layer_blocks(t,L,n): return tuple(map(int,t.split(',')))
def format_table(*a): return str(a[0])
