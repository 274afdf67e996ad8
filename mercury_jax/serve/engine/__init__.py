"""The engine: requests in, slots of one state machine, snapshots out."""
