from sglang_tknp.placement import ModelBytes
def read_model_bytes(p,L,tied): return ModelBytes(0,(1,)*L,0,0,tied)
def estimate_model_bytes(c,d): return ModelBytes(0,(1,)*c['num_hidden_layers'],0,0,False)
