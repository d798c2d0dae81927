"""What is kept: snapshots of the training state in memory that outlives a rank, persisted behind its back.

flash      what a script calls            plan, encoding   state → named tensors and values
ledger     who may write which slot       slots, decisions (pure) the rule behind it
arena      the memory of the slots        saver            the process that persists
storage, manifest, shards, digest         what lies on disk
"""
