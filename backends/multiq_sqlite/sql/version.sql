SELECT max(version) FROM multiq_schema
