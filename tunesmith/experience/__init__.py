"""What was sampled, as data: samples and their tries. No tensors here."""
