DELETE FROM multiq_notes WHERE home = :home AND key = :key
